"""Subjects of sequences: what operations there are for each, and how they are drawn and compared."""

from __future__ import annotations

from functools import partial

from padless.verify.fuzz.problem import Draw, Options, Subject
from padless.verify.fuzz.states import layers, sequence, sites
from padless.verify.fuzz.states.modules import MODULES
from padless.verify.fuzz.states.uses import USES
from padless.verify.fuzz.states.writes import WRITES

OF_LAYERS = WRITES | MODULES | USES


def _of_layers(draw: Draw, constants: Options) -> Options:
    del constants
    return {"rows": layers.rows_of(draw), "seed": draw.data_seed(), "operations": sequence.drawn(draw, OF_LAYERS)}


def _subject(family: str, constants: object, share: int, variants: int) -> Subject:
    make = partial(layers.layer_of, family)
    return Subject(constants, _of_layers, partial(sequence.judge, make, OF_LAYERS), share, variants)  # type: ignore[arg-type]


STATES: dict[str, Subject] = {
    "states.linear": _subject("linear", layers.constants, 10, 8),
    "states.experts": _subject("experts", layers.experts_constants, 6, 6),
    "states.moe": _subject("moe", layers.experts_constants, 5, 6),
    "states.call": Subject(sites.constants, sites.rest, partial(sequence.judge, sites.Site, sites.SITES), 10, 12),
}

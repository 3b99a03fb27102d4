"""Names that string arguments of public calls may be, as types: a type checker refuses the others, the calls do too."""

from __future__ import annotations

from typing import Literal

Kind = Literal["activation", "weight"]
ScaleMajor = Literal["mn", "k"]
ScaleLayout = Literal["plain", "blocked", "blocked_groups"]
ScaleRule = Literal["rceil", "floor", "te", "torchao"]
OutputLayout = Literal["plain", "plain_mn", "blocked", "blocked_groups"]
Semantics = Literal["implementation", "documented"]
SwigluGateUp = Literal["concatenated", "interleaved"]
GateUp = Literal["concatenated", "interleaved", "alternating"]
ActivationKind = Literal["swiglu", "geglu", "relu2", "gelu", "silu"]
Score = Literal["softmax", "sigmoid"]
WgradMode = Literal["1d2d", "1d1d"]
Saved = Literal["bf16", "fp8", "recompute"]
BackendName = Literal["cuda", "emulator", "emulator:sm_100a", "reference"]
Exchange = Literal["auto", "collective", "symm", "deepep"]
Sums = Literal["ranks", "slots"]
AdapterLayout = Literal["parameters", "modules"]

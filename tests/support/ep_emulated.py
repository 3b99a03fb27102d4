"""The "symm" backend's kernels as machine code for Hopper in the emulator, for virtual ranks on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from padless.emulator import Emulator
from support.emulated_triton import EmulatedKernel

KERNELS = (
    ("cells", "await_ranks"),
    ("publish", "publish"),
    ("publish", "publish_ids"),
    ("receive", "localize"),
    ("receive", "fan_out"),
    ("receive_few", "receive_few"),
    ("receive_gradients", "fan_out_gradients"),
    ("send_back", "fan_in"),
    ("send_back", "finish"),
)


class EmulatedExchange(EmulatedKernel):
    """A kernel whose first argument is a tensor of addresses of `buffers`, which become the emulator's addresses."""

    buffers: list[torch.Tensor]

    def _launch(self, grid: tuple[int, ...], args: tuple, options: dict[str, Any]) -> None:
        assert [b.data_ptr() for b in self.buffers] == args[0].tolist()
        self._addresses = args[0]
        super()._launch(grid, args, options)

    def _value(self, emulator: Emulator, argument: Any) -> int | float:  # type: ignore[override]
        if argument is self._addresses:
            there = [EmulatedKernel._value(emulator, b) for b in self.buffers]
            self._translated = torch.tensor(there, dtype=torch.int64)
            return EmulatedKernel._value(emulator, self._translated)
        return EmulatedKernel._value(emulator, argument)


def emulate(
    monkeypatch: Any, buffers: list[torch.Tensor], make: Callable[[Any], EmulatedExchange] = EmulatedExchange
) -> dict[str, EmulatedExchange]:
    """Every exchange kernel replaced by its emulated machine code; by name."""
    from padless.distributed.triton import cells, publish, receive, receive_few, receive_gradients, send_back
    from padless.quantization.triton import casts

    monkeypatch.setattr(casts, "casts_in_hardware", lambda device: True)
    modules = (cells, publish, receive, receive_few, receive_gradients, send_back)
    named = {m.__name__.rpartition(".")[2]: m for m in modules}
    kernels = {}
    for module, name in KERNELS:
        kernels[name] = make(getattr(named[module], name))
        kernels[name].buffers = buffers
        monkeypatch.setattr(named[module], name, kernels[name])
    return kernels

"""A clock for the emulator: cycles of a launch by role and phase, and what sets its pace (docs/timing.md)."""

from padless.emulator.timing.machine import TimedMachine, timed
from padless.emulator.timing.rates import B200, CHIPS, H200, Chip, Rate, chip_of
from padless.emulator.timing.timeline import Timeline

__all__ = ["B200", "CHIPS", "H200", "Chip", "Rate", "TimedMachine", "Timeline", "chip_of", "timed"]

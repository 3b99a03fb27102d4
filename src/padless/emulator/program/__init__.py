"""Stand-in for the CUDA driver and torch.cuda: whole programs without a GPU, kernels in the emulator."""

from padless.emulator.program.run import Launched as Launched
from padless.emulator.program.run import Session as Session
from padless.emulator.program.run import install as install
from padless.emulator.program.run import run_program as run_program

"""`padless verify`: everything that must hold on a GPU."""

from padless.verify.run import run_verify

__all__ = ["run_verify"]

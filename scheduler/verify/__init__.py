"""Proves that a program is right for every step that it may run. The verifier shares no code with the scheduler."""

from megakernel.scheduler.verify.proof import Report, verify

__all__ = ["Report", "verify"]

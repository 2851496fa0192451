"""Proves that a program computes the right results, without races or deadlocks, for all inputs that a step may have. To
be independent, it shares no code with the part of the compiler that it checks."""

from megakernel.scheduler.verify.proof import Report, verify

"""Simulates how a program runs on a machine that a file describes. The machine itself need not be present."""

from megakernel.scheduler.simulate.run import Simulation, simulate

"""Simulates a program on a machine that is not here."""

from .run import Simulation, Stall, simulate

__all__ = ["Simulation", "Stall", "simulate"]

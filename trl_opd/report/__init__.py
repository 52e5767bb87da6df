"""The report of a run: one page that opens offline. Nothing here needs torch but `recorder.py`, imported by itself."""

from .serve import main as main

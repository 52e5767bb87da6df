"""The report of a run: one page that opens offline. What is here needs no torch; `recorder.py` does, and is imported by itself."""

from .serve import main as main

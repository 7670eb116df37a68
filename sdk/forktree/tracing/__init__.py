"""Traces, for whoever asks for them: what a span is here, and how spans reach a collector.

Programs record spans of their own making, after the fact and from clocks that they have anyway. Nothing of
OpenTelemetry is imported before a collector is named; see `exporting`.
"""

"""Measuring what eager runs spend their time on."""

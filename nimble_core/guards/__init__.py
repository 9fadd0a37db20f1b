"""Is the model still the one that was prepared?"""

"""What layers leave for later: the layers that defer weight gradients, the products to compute then, and the keys that
slices of a sequence leave for later slices. Knows neither schedules nor ranks.
"""

"""Deferred weight gradients: the layers that defer them, and the products to compute later. Knows neither schedules nor
ranks.
"""

"""Weight gradients for later: layers that leave them, and what they leave. Knows neither schedules nor ranks."""

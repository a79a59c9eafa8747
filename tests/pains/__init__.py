"""The twenty rows of what hurts users of attention, each as tests, and the removals that make them fail."""

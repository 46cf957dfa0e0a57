"""What people do with a model: data, steps, loops, comparisons."""

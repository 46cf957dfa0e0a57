"""What the numbers of the documentation come from: comparisons, codecs, recipes, over seeds."""

"""Few-shot learning: data sets with classes apart, and classifiers of episodes on features that stay as they are."""

"""Generation of images: two players, and how good what they make is."""

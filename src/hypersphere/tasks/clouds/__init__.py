"""Point clouds: ModelNet40 and simple shapes, PointNet and PointNet++, and which points speak for a class."""

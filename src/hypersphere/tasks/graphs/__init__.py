"""Nodes of citation graphs: Cora, Citeseer and PubMed, and graph convolutional networks."""

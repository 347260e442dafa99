"""What runs inside the training process, in the order of the data: patches and sites, features, measure, record."""

"""airbench94 (Jordan 2024, arXiv:2404.00498): what its setting has that ddp_train has not."""

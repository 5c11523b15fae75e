"""Every method with a paper, beside other code: `make methods`."""

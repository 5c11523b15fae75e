"""What is imported, when: parts of our packages at first use, names of other libraries where their version has them."""

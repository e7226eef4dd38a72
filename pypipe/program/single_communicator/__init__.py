"""What differs where each pair of ranks has one communicator for both directions."""

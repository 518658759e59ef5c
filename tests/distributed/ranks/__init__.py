"""What several processes do together, by pytest on each of them; tests/distributed/test_distributed.py starts them."""

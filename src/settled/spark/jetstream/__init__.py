"""JetStream as the broker behind the source: a group's books are kept in a key-value bucket."""

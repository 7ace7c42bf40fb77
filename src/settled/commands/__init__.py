"""Commands for operators: publish a message, look at queues, deal with dead letters."""

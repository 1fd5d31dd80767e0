"""What an answer is worth under each way of reusing documents: data, methods, metrics and reports (``hypic eval``)."""

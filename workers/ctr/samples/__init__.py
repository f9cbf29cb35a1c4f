"""Sources of click samples: MovieLens, flights, one's own files, a Kafka topic."""

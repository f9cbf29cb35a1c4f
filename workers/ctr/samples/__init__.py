"""Where samples of clicks come from: MovieLens, flights, files of one's own."""

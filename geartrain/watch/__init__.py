"""What a running cluster is asked again and again, and the page that shows it."""

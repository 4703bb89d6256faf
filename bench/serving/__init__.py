"""What `nox -s serve_cpu` asks of real servers."""

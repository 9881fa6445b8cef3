"""How fast Quiver is, as ratios measured side by side: `python -m benchmarks`. See README.md."""

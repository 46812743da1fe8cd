"""Pensieve on a Ray cluster. Needs the extra `ray`. The import path is
`pensieve.ray_serve.application:build`."""

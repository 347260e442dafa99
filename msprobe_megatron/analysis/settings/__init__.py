"""How two jobs were configured: environment, arguments, launch scripts."""

"""The data of the HTML page, one file per part of it."""

"""Stands in for CANN's acl: hosts ask it which chip this is."""


def get_soc_name():
    return "stand-in"

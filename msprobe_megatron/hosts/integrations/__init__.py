"""The kit in other people's training frameworks: one file a framework, each a few lines over `attach`.

No framework is imported before its class is asked for; a callback is an ordinary object with the framework's
method names where the framework does not insist on a base class.
"""

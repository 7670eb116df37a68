"""Pure decisions: what an object's state and the state of the nodes call for, without any I/O.

Every function here may be asked again at any time with what is then known. A lost, doubled or late event
therefore changes nothing but the time at which something is decided.
"""

"""Steps on a GPU without waiting: inputs, sampled tokens and their use in the next step stay on the device, in stream
order.
"""

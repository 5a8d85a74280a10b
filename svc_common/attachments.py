"""The limit of a request's attachment: data of the gateway that the scheduler stores with a request."""

MAX_ATTACHMENT_BYTES = 4 * 2**20

"""The file with the deployment's secret."""

from pathlib import Path

from svc_common.files import why_unreadable
from svc_common.identity import SECRET_FILE, InvalidCredentials, make_secret, read_secret
from svc_common.supervisor.settings import SupervisorSettings


def prepare_secret(settings: SupervisorSettings) -> Path | None:
    """The absolute path of the file, which is made if no setting names it; None: services do not check their callers.

    Raises InvalidCredentials.
    """
    if settings.insecure:
        return None
    named = settings.deployment_secret_file
    path = (named or settings.run_dir / SECRET_FILE).absolute()
    if named is None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            make_secret(path)
        except OSError as error:
            raise InvalidCredentials(f"{path} cannot be made: {why_unreadable(error)}") from error
    try:
        read_secret(path)
    except InvalidCredentials as error:
        raise InvalidCredentials(f"QUIRE_DEPLOYMENT_SECRET_FILE: {error}") from error
    return path

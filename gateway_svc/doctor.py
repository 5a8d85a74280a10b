"""The gateway's checks of `quire doctor`. svc_common/doctor loads this module by its name."""

import resource
import time
from collections.abc import Iterator

from gateway_svc.http_api.connection import allow_open_files
from gateway_svc.key_file import read_key_file
from gateway_svc.key_tables import InvalidKeyFile
from gateway_svc.model_catalog import CatalogModel
from gateway_svc.settings import BadSetting, GatewaySettings
from gateway_svc.tokenizer import InvalidModelFiles
from svc_common.doctor.certificates import check_expiry
from svc_common.doctor.credentials import check_credentials
from svc_common.doctor.findings import Check, CheckContext, CheckGroup, Finding, ok, skipped, warning, wrong
from svc_common.doctor.ports import check_ports, check_socket_path
from svc_common.doctor.prepared import is_prepared, next_step_for
from svc_common.files import may_others_access
from svc_common.inner_ports import is_loopback
from svc_common.model_settings import InvalidModelsFile
from svc_common.model_tasks import ModelTask
from svc_common.models import ModelNotFound
from svc_common.service_roles import ServiceRole


def check_models(context: CheckContext) -> Iterator[Finding]:
    """Loads tokenizer, chat template and defaults of each model, as at the start."""
    settings: GatewaySettings = context.settings
    try:
        models = settings.model_settings()
    except InvalidModelsFile as error:
        yield wrong("QUIRE_MODELS", str(error), "correct the file; docs/operations.md, Several models, describes it")
        return
    for each in models:
        named = each.model or "the default model"
        try:
            of_model = (each.model, each.revision, each.tokenizer, each.tokenizer_revision)
            if context.by_supervisor and not is_prepared(*of_model, with_weights=False):
                yield skipped(f"{named} is not prepared yet; `make run` downloads or converts it first")
                continue
            model = CatalogModel.load(each)
        except ModelNotFound as error:
            yield wrong(named, str(error), next_step_for(error))
            continue
        except (BadSetting, InvalidModelFiles) as error:
            yield wrong(named, str(error), "correct the file or setting; or download the model's files again")
            continue
        template = model.tokenizer.chat_template
        if model.grammars is not None:
            model.grammars.close()
        model.tokenizer.close()
        where = each.resolve().tokenizer_path
        if model.task is not ModelTask.GENERATE:
            yield ok(f"{model.name}: tokenizer of {where}")
        elif template is None:
            problem = "it has no chat template: chats are refused, completions work"
            yield warning(f"{model.name}: tokenizer", problem, "set QUIRE_CHAT_TEMPLATE to a template, or its file")
        else:
            yield ok(f"{model.name}: tokenizer and chat template of {where}")


def check_keys(context: CheckContext) -> Iterator[Finding]:
    settings: GatewaySettings = context.settings
    path = settings.api_keys
    if path is None:
        if is_loopback(settings.host):
            yield ok("no keys are required (QUIRE_API_KEYS is not set)")
        else:
            problem = f"anyone who reaches {settings.host} may use the models"
            step = "set QUIRE_API_KEYS to a file of keys, which docs/api.md, API keys, describes"
            yield warning("no keys are required", problem, step)
        return
    try:
        contents = read_key_file(path)
    except InvalidKeyFile as error:
        yield wrong("QUIRE_API_KEYS", str(error), "correct the file; docs/api.md, API keys, describes it")
        return
    expired = sum(key.expires is not None and key.expires <= time.time() for key in contents.keys)
    tokens = ", and tokens of an issuer" if contents.token_rules else ""
    found = f"{path}: {len(contents.keys)} keys{tokens}"
    if may_others_access(path.stat().st_mode):
        yield warning(found, "all users of this machine can access it", f"chmod o= {path}")
    elif expired:
        yield warning(found, f"{expired} of them have expired and are refused", "remove them, or set another `expires`")
    else:
        yield ok(found)


def check_tls(context: CheckContext) -> Iterator[Finding]:
    settings: GatewaySettings = context.settings
    try:
        files = settings.tls_files()
    except BadSetting as error:
        yield wrong("TLS for clients", str(error), "set both files, of a certificate and of its own key, in PEM format")
        return
    if files is None or settings.tls_cert_file is None:
        yield ok("no TLS for clients (QUIRE_TLS_CERT_FILE is not set)")
    else:
        yield from check_expiry("QUIRE_TLS_CERT_FILE", settings.tls_cert_file, settings.tls_key_file)


def check_own_credentials(context: CheckContext) -> Iterator[Finding]:
    settings: GatewaySettings = context.settings
    dials = settings.scheduler_addresses
    yield from check_credentials(ServiceRole.GATEWAY, settings, (), dials, "QUIRE_SCHEDULERS_AT")


def check_own_ports(context: CheckContext) -> Iterator[Finding]:
    settings: GatewaySettings = context.settings
    names = ["http_port", "grpc_port", "gateway_metrics_port"]
    if settings.uds is not None:
        names.remove("http_port")
        yield from check_socket_path(settings.uds)
    ports = [(name, getattr(settings, name)) for name in names]
    yield from check_ports([(settings.host, port, f"QUIRE_{name.upper()}") for name, port in ports if port is not None])


def check_open_files(context: CheckContext) -> Iterator[Finding]:
    """Raises this process's own soft limit, as a gateway does at its start."""
    settings: GatewaySettings = context.settings
    connections = settings.max_http_connections + settings.max_grpc_connections
    allow_open_files(connections)
    most, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_bounded = most != resource.RLIM_INFINITY
    found = f"{f'{most:,}' if is_bounded else 'any number of'} open files for {connections:,} connections"
    if is_bounded and most <= connections:
        step = (
            f"raise the hard limit above {connections:,} (`ulimit -Hn`, LimitNOFILE of systemd), or lower "
            "QUIRE_MAX_HTTP_CONNECTIONS and QUIRE_MAX_GRPC_CONNECTIONS"
        )
        yield warning(found, f"the hard limit is {hard:,}: connections beyond it fail", step)
    else:
        yield ok(found)


GROUP = CheckGroup(
    (
        Check("models", check_models, 120),
        Check("keys", check_keys),
        Check("tls", check_tls),
        Check("credentials", check_own_credentials),
        Check("ports", check_own_ports),
        Check("open files", check_open_files),
    ),
    settings=GatewaySettings,
)

-- Encryption of payloads, the option encrypt of a queue. docs/format.md has the layout. Keys are in a file that is read
-- by the server and never by SQL; what is encrypted stays so in the timer, the segment and the dead letter.

-- A key a message, derived from the one in the file: with random nonces one AES-GCM key is good for 2^32 messages (NIST SP
-- 800-38D, section 8.3), which a busy queue sends in days. The derivation is HKDF-Expand of RFC 5869 with SHA-256.
create function queen._crypt(
    p_encrypt boolean,
    p_path text,
    p_tenant uuid,
    p_queue text,
    p_partitions text[],
    p_ids uuid[],
    p_payloads bytea[])
returns bytea[]
language plpython3u
volatile
as $$
import hmac
import os
import stat
import struct
import uuid


def fail(message, hint):
    plpy.error(message, hint=hint, sqlstate="QN011")


FORM = (
    "Each line is ID KEY: a name of up to 64 letters, digits, . _ -, and 32 bytes in base64"
    " (openssl rand -base64 32)."
)
PATH = (
    "An administrator sees the path in queen.settings, key_file; the owner of pg_queen sets it with queen.configure."
)

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
except ImportError:
    fail("the server's Python cannot import cryptography", "On the server run: apt-get install python3-cryptography")


def read():
    """Keys by id in the order of the file, whose last one encrypts."""
    import base64
    import re

    if p_path == "none":
        fail("there is no key file", "As the owner of pg_queen: select queen.configure('key_file', '/path/to/file').")
    try:
        handle = os.open(p_path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(handle, "rb") as file:
            about = os.fstat(handle)
            version = (p_path, about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns)
            if not stat.S_ISREG(about.st_mode) or about.st_size > 1 << 16:
                fail("the key file is no file of up to 64 KiB", PATH)
            if about.st_uid != os.geteuid() or about.st_mode & 0o077:
                fail(
                    "the key file may be read by others than the server's user",
                    "On the server: chown postgres FILE; chmod 600 FILE.",
                )
            lines = file.read().decode("ascii", "replace").splitlines()
    except OSError as error:
        fail("the key file cannot be read: %s" % error.strerror, PATH)
    keys = {}
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.startswith("#"):
            # The line itself is never told.
            name, _, text = line.strip().partition(" ")
            try:
                key = base64.b64decode(text.strip(), validate=True)
            except ValueError:
                key = b""
            if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name) or len(key) != 32:
                fail("line %d of the key file is no key" % number, FORM)
            if name in keys:
                fail(
                    'line %d of the key file has the id "%s" again' % (number, name),
                    "Ids stay with their keys: give a new key a new one.",
                )
            keys[name] = key
    if not keys:
        fail("the key file holds no key", FORM)
    SD["keys"] = (version, keys)
    return keys


def keys():
    kept = SD.get("keys")
    if kept is not None:
        try:
            about = os.stat(p_path)
            if kept[0] == (p_path, about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns):
                return kept[1]
        except (OSError, ValueError):
            pass
        del SD["keys"]
    return read()


def cipher(key, mid):
    return AESGCM(hmac.digest(key, b"pg_queen 1" + mid + b"\x01", "sha256"))


def context(partition, mid):
    """What is authenticated beside the payload."""
    texts = (p_queue.encode(), partition.encode())
    return uuid.UUID(p_tenant).bytes + mid + b"".join(struct.pack(">H", len(t)) + t for t in texts)


known = keys()
results = []
if p_encrypt:
    name = list(known)[-1]
    head = struct.pack(">BB", 1, len(name)) + name.encode()
    for partition, message_id, payload in zip(p_partitions, p_ids, p_payloads):
        mid, nonce = uuid.UUID(message_id).bytes, os.urandom(12)
        results.append(head + nonce + cipher(known[name], mid).encrypt(nonce, payload, context(partition, mid)))
    return results
for partition, message_id, payload in zip(p_partitions, p_ids, p_payloads):
    mid, at = uuid.UUID(message_id).bytes, 2 + (payload[1] if len(payload) > 1 else 0)
    if len(payload) < at + 28 or payload[0] != 1:
        fail(
            "message %s is damaged: no encrypted payload" % message_id,
            "Restore it from a backup, or skip it with queen.seek.",
        )
    name = payload[2:at].decode("ascii", "replace")
    if name not in known:
        fail(
            'message %s is encrypted with key "%s", which the key file has not' % (message_id, name),
            "Put the key back into the key file.",
        )
    nonce, sealed = payload[at : at + 12], payload[at + 12 :]
    try:
        results.append(cipher(known[name], mid).decrypt(nonce, sealed, context(partition, mid)))
    except InvalidTag:
        fail(
            'message %s cannot be decrypted with key "%s"' % (message_id, name),
            "Either the key file has another key under that id, or the message was changed or moved by hand.",
        )
return results
$$;
comment on function queen._crypt(boolean, text, uuid, text, text[], uuid[], bytea[]) is
  'Payloads of one queue encrypted with the last key of the file, or decrypted with the one each names: AES-256-GCM,'
  ' authenticated over tenant, queue, partition and message id. Without payloads it checks the key file. Errors: QN011.';

-- PL/Python's errors come with its name in front; this says what it said.
create function queen._raise(p_state text, p_message text, p_hint text)
returns void
language plpgsql
stable
set search_path = pg_catalog, queen, pg_temp
as $$
begin
  raise exception using errcode = p_state, message = regexp_replace(p_message, '^plpy[.]Error: ', ''), hint = coalesce(p_hint, '');
end
$$;
comment on function queen._raise(text, text, text) is 'Raises an error that PL/Python raised, without the name of its class.';

create function queen._encrypt(
    p_tenant uuid, p_queue text, p_partitions text[], p_ids uuid[], p_payloads bytea[], p_path text default queen._setting('key_file'))
returns bytea[]
language plpgsql
volatile
set search_path = pg_catalog, queen, pg_temp
as $$
declare
  v_message text;
  v_hint text;
begin
  return queen._crypt(true, p_path, p_tenant, p_queue, p_partitions, p_ids, p_payloads);
exception when sqlstate 'QN011' then
  get stacked diagnostics v_message = message_text, v_hint = pg_exception_hint;
  perform queen._raise('QN011', v_message, v_hint);
  return null;
end
$$;
comment on function queen._encrypt(uuid, text, text[], uuid[], bytea[], text) is 'Stored payloads of one queue encrypted, in their order.';

create function queen._check_keys(p_path text)
returns void
language plpgsql
volatile
set search_path = pg_catalog, queen, pg_temp
as $$
begin
  perform queen._encrypt('00000000-0000-0000-0000-000000000001', '', '{}', '{}', '{}', p_path);
end
$$;
comment on function queen._check_keys(text) is 'Refuses a key file that cannot be used. Errors: QN011.';

create function queen._decrypt(p_tenant uuid, p_queue text, p_partition text, p_id uuid, p_payload bytea)
returns bytea
language sql
volatile
return (queen._crypt(false, queen._setting('key_file'), p_tenant, p_queue, array[p_partition], array[p_id], array[p_payload]))[1];
comment on function queen._decrypt(uuid, text, text, uuid, bytea) is 'A stored payload as it was before it was encrypted.';

//! The identity of an initiator, and the options of its connections.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use riopipe_platform::{PrivateFileError, read_private_file};
use riopipe_session::auth::host::HostSecrets;

pub use riopipe_nvme::dhchap_secret::{DhchapSecret, DhchapSecretError};
pub use riopipe_nvme::tls_psk::{TlsPsk, TlsPskError};

/// The options of connections to targets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectOptions {
    /// The host NQN of this initiator.
    pub host_nqn: String,
    /// The host identifier of this initiator.
    pub host_id: [u8; 16],
    /// The secrets for targets that demand authentication.
    pub dhchap: Option<Dhchap>,
    /// The key of TLS that this host has in common with the targets. With it, every connection is one with
    /// TLS 1.3; targets without TLS, or without the key, are refused.
    pub tls: Option<TlsPsk>,
    /// CRC32C over every PDU's header.
    pub header_digest: bool,
    /// CRC32C over every PDU's data. `None`: on, except over loopback.
    pub data_digest: Option<bool>,
    /// The time limit for making a connection, and for an answer. Streams and readers have their
    /// own limit for answers to reads and writes
    /// ([`StreamOptions::timeout`](crate::StreamOptions::timeout)).
    pub timeout: Duration,
    /// The keep-alive timeout (KATO): a target drops an association over which no command arrives
    /// for this time. Keep-alives are sent three times as often. At least 300 ms; targets round it
    /// up to their own unit.
    pub keep_alive: Duration,
    /// How long a target of an open volume may be unreachable. Until then its streams wait for it,
    /// and when it comes back they replay the requests that it has lost (promise P7); then they
    /// fail (promise P6). The time counts from the target's last sign of life: the end of its
    /// connection, or the last byte that it sent before it fell silent. A silence of less than 3 s is
    /// no loss, whatever this time is. Zero: the streams fail as soon as a connection is lost, and it
    /// is not made again. Targets keep a volume for its owner for a day at most (trap T28): if an owner
    /// waits longer, another initiator may own the volume by then.
    pub loss_timeout: Duration,
    /// How long to poll for an answer before going to sleep (hybrid waiting); zero: sleep at once.
    pub spin: Duration,
}

/// The secrets of in-band authentication (DH-HMAC-CHAP).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dhchap {
    /// The secret of this host, as the targets have it for its NQN.
    pub secret: DhchapSecret,
    /// The secret of the targets. With it, each target must prove its own identity, too.
    pub controller_secret: Option<DhchapSecret>,
}

/// Why the file of a secret can't be used. No text has the secret.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SecretFileError {
    /// The caller gave the secret itself, and not the path of its file.
    #[error("this is a secret itself (not shown): give the path of a file with it")]
    Inline,
    /// The file can't be read.
    #[error("{}: {error}: give the path of a file with a secret", .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        error: std::io::Error,
    },
    /// Others than the owner of the file may use it.
    #[error(
        "{}: others than its owner may use it (mode {mode:04o}), and it has a secret: `chmod 600` it",
        .path.display()
    )]
    Shared {
        /// The file.
        path: PathBuf,
        /// The lowest 12 bits of its mode.
        mode: u32,
    },
    /// The content of the file is no secret.
    #[error("{}: no secret: {error}: make one with `nvme gen-dhchap-key`", .path.display())]
    Secret {
        /// The file.
        path: PathBuf,
        /// The cause.
        error: DhchapSecretError,
    },
}

/// Reads the secret of a file.
fn read_secret(path: &Path) -> Result<DhchapSecret, SecretFileError> {
    if path.as_os_str().as_encoded_bytes().starts_with(b"DHHC-1:") {
        return Err(SecretFileError::Inline);
    }
    let text = read_private_file(path).map_err(|error| match error {
        PrivateFileError::Read(error) => SecretFileError::Read { path: path.into(), error },
        PrivateFileError::Shared(mode) => SecretFileError::Shared { path: path.into(), mode },
    })?;
    DhchapSecret::parse(&text).map_err(|error| SecretFileError::Secret { path: path.into(), error })
}

impl Dhchap {
    /// Reads the secrets from files that have them as text (`DHHC-1:…`, as `nvme gen-dhchap-key`
    /// makes it): the secret of this host, and, if each target must prove its own identity, that of
    /// the targets. Only the owner of a file may have permissions for it.
    ///
    /// # Errors
    /// [`SecretFileError`].
    pub fn from_files(
        secret: &Path,
        controller_secret: Option<&Path>,
    ) -> Result<Self, SecretFileError> {
        Ok(Self {
            secret: read_secret(secret)?,
            controller_secret: controller_secret.map(read_secret).transpose()?,
        })
    }

    pub(crate) fn for_session(&self) -> Arc<HostSecrets> {
        Arc::new(HostSecrets {
            host: self.secret.clone(),
            controller: self.controller_secret.clone(),
            random: riopipe_platform::random_bytes,
        })
    }
}

impl Default for ConnectOptions {
    /// The identity from `/etc/nvme/hostnqn` and `/etc/nvme/hostid`, else one derived from the
    /// machine's id; no secrets, no TLS; header digests off, data digests on beyond loopback; `timeout` 10 s,
    /// `keep_alive` 15 s, `loss_timeout` 30 s, `spin` 200 µs.
    fn default() -> Self {
        let (host_nqn, host_id) = identity();
        Self {
            host_nqn,
            host_id,
            dhchap: None,
            tls: None,
            header_digest: false,
            data_digest: None,
            timeout: Duration::from_secs(10),
            keep_alive: Duration::from_secs(15),
            loss_timeout: Duration::from_secs(30),
            spin: Duration::from_micros(200),
        }
    }
}

impl ConnectOptions {
    /// [`keep_alive`](Self::keep_alive) as targets get it, ms.
    pub(crate) fn keep_alive_ms(&self) -> u32 {
        u32::try_from(self.keep_alive.as_millis()).unwrap_or(u32::MAX).max(300)
    }
}

fn identity() -> (String, [u8; 16]) {
    let read = |path: &str| std::fs::read_to_string(path).ok().map(|s| s.trim().to_owned());
    let id = read("/etc/nvme/hostid")
        .or_else(|| read("/etc/machine-id"))
        .and_then(|text| parse_id(&text))
        .unwrap_or([0x52; 16]);
    let nqn =
        read("/etc/nvme/hostnqn").filter(|nqn| nqn.starts_with("nqn.")).unwrap_or_else(|| {
            format!("nqn.2014-08.org.nvmexpress:uuid:{}", riopipe_order::attribute::VolumeId(id))
        });
    (nqn, id)
}

/// 32 hex digits, with or without dashes.
fn parse_id(text: &str) -> Option<[u8; 16]> {
    let digits: Vec<u8> = text
        .chars()
        .filter(|c| *c != '-')
        .map(|c| c.to_digit(16).map(|d| d as u8))
        .collect::<Option<_>>()?;
    let mut id = [0; 16];
    if digits.len() != 32 {
        return None;
    }
    for (byte, pair) in id.iter_mut().zip(digits.chunks(2)) {
        *byte = pair[0] << 4 | pair[1];
    }
    Some(id)
}

/// A fresh random id.
pub(crate) fn random_id() -> std::io::Result<[u8; 16]> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/uuid")?;
    parse_id(text.trim())
        .ok_or_else(|| std::io::Error::other("the kernel's random uuid is no uuid"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_read_in_both_forms() {
        let id = parse_id("01234567-89ab-cdef-0123-456789abcdef").unwrap();
        assert_eq!(Some(id), parse_id("0123456789abcdef0123456789abcdef"));
        assert_eq!(parse_id("xyz"), None);
        assert_ne!(random_id().unwrap(), random_id().unwrap());
    }

    #[test]
    fn this_host_has_an_identity() {
        let options = ConnectOptions::default();
        assert!(options.host_nqn.starts_with("nqn.") && options.host_nqn.len() <= 223);
    }
}

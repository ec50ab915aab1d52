//! The secrets of hosts and of the target, for authentication with DH-HMAC-CHAP and for TLS: where a
//! configuration has them, and how they are read.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use riopipe_nvme::auth::{GroupId, HashId};
use riopipe_nvme::dhchap_secret::DhchapSecret;
use riopipe_nvme::fabrics::check_nqn;
use riopipe_nvme::tls_psk::TlsPsk;
use riopipe_platform::{PrivateFileError, check_private_file, read_private_file};
use riopipe_session::auth::controller::AuthRules;
use riopipe_session::target::{Access, HostAccess};
use serde::{Deserialize, Serialize, Serializer};
use zeroize::Zeroizing;

use crate::check::Problem;
use crate::config::Config;

/// The starts of a secret that is in the configuration itself: one of DH-HMAC-CHAP, and a key of TLS.
const INLINE: [&str; 2] = ["DHHC-1:", "NVMeTLSkey-1:"];

/// The part of a configuration about authentication (`[dhchap]`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DhchapOptions {
    /// The secret of each host that must authenticate, by NQN. These hosts may connect; others may only if
    /// `hosts` lists them.
    pub hosts: BTreeMap<String, SecretSource>,
    /// The secret with which the target proves its own identity to hosts that ask for that.
    pub controller: Option<SecretSource>,
    /// The hash functions that are allowed, the preferred one first: `sha256`, `sha384`, `sha512`. All of
    /// them, in this order, if empty.
    pub hashes: Vec<String>,
    /// The Diffie-Hellman groups that are allowed, the preferred one first: `null`, `ffdhe2048`,
    /// `ffdhe3072`, `ffdhe4096`, `ffdhe6144`, `ffdhe8192`. All of them, in this order, if empty.
    pub dhgroups: Vec<String>,
}

impl DhchapOptions {
    /// Whether a secret is in the configuration itself.
    #[must_use]
    pub fn has_secrets(&self) -> bool {
        self.hosts.values().chain(&self.controller).any(SecretSource::is_inline)
    }
}

/// The place of a secret: the path of a file, or the secret itself (`DHHC-1:…` or `NVMeTLSkey-1:…`), which no
/// formatting shows.
#[derive(Clone, PartialEq, Eq, Deserialize)]
#[serde(from = "String")]
pub struct SecretSource(Zeroizing<String>);

impl SecretSource {
    /// A file with the secret.
    #[must_use]
    pub fn file(path: &str) -> Self {
        Self(Zeroizing::new(path.to_owned()))
    }

    /// Whether a text has a secret in it.
    pub(crate) fn is_in(text: &str) -> bool {
        INLINE.iter().any(|start| text.contains(start))
    }

    /// Whether this is the secret itself.
    #[must_use]
    pub fn is_inline(&self) -> bool {
        INLINE.iter().any(|start| self.0.starts_with(start))
    }

    /// The text of the source without the secret.
    fn shown(&self) -> &str {
        if self.is_inline() { "(a secret, not shown)" } else { &self.0 }
    }

    /// Reads a secret of DH-HMAC-CHAP.
    ///
    /// # Errors
    /// The defect, and the remedy. Neither has the secret.
    pub fn read(&self) -> Result<DhchapSecret, (String, &'static str)> {
        self.parsed(DhchapSecret::parse, "make one with `nvme gen-dhchap-key`, as the host has it")
    }

    /// Reads a key of TLS.
    ///
    /// # Errors
    /// The defect, and the remedy. Neither has the key.
    pub fn read_psk(&self) -> Result<TlsPsk, (String, &'static str)> {
        self.parsed(TlsPsk::parse, "make one with `nvme gen-tls-key`, as the host has it")
    }

    /// Reads a secret, whose text `parse` takes.
    fn parsed<T, E: fmt::Display>(
        &self,
        parse: impl Fn(&str) -> Result<T, E>,
        remedy: &'static str,
    ) -> Result<T, (String, &'static str)> {
        if self.is_inline() {
            return parse(&self.0)
                .map_err(|error| (format!("the secret is not valid: {error}"), remedy));
        }
        let path: &str = &self.0;
        let text = read_private(Path::new(path))?;
        parse(&text).map_err(|error| (format!("{path}: no secret: {error}"), remedy))
    }
}

impl From<String> for SecretSource {
    fn from(text: String) -> Self {
        Self(Zeroizing::new(text))
    }
}

impl fmt::Debug for SecretSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.shown())
    }
}

impl Serialize for SecretSource {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.shown())
    }
}

/// Reads a file that others may not read.
///
/// # Errors
/// The defect, and the remedy.
fn read_private(path: &Path) -> Result<Zeroizing<String>, (String, &'static str)> {
    read_private_file(path).map_err(|error| described(path, &error))
}

/// Checks that only the owner of a file has permissions for it.
///
/// # Errors
/// The defect, and the remedy.
pub(crate) fn check_private(path: &Path, file: &File) -> Result<(), (String, &'static str)> {
    check_private_file(file).map_err(|error| described(path, &error))
}

/// The defect of a file with a secret, and the remedy.
fn described(path: &Path, error: &PrivateFileError) -> (String, &'static str) {
    match error {
        PrivateFileError::Read(error) => {
            (format!("{}: {error}", path.display()), "give the path of a file with a secret")
        }
        PrivateFileError::Shared(mode) => (
            format!("{}: others than its owner may use it (mode {mode:04o})", path.display()),
            "it has a secret: `chmod 600` it",
        ),
    }
}

/// The hosts that may connect and their secrets, as the configuration has them.
pub(crate) fn access(config: &Config) -> Result<Arc<Access>, Vec<Problem>> {
    let mut problems = Vec::new();
    let mut read = |place: String, source: &SecretSource| match source.read() {
        Ok(secret) => Some(secret),
        Err((what, advice)) => {
            problems.push(Problem::new(place, what, advice));
            None
        }
    };
    let DhchapOptions { hosts, controller, hashes, dhgroups } = &config.dhchap;
    let mut admitted: BTreeMap<String, HostAccess> =
        config.hosts.iter().flatten().map(|host| (host.clone(), HostAccess::ByName)).collect();
    for host in config.tls.hosts.keys() {
        admitted.entry(host.clone()).or_insert(HostAccess::ByName);
    }
    for (host, source) in hosts {
        if let Some(secret) = read(format!("dhchap.hosts.{host:?}"), source) {
            admitted.insert(host.clone(), HostAccess::BySecret(secret));
        }
    }
    let controller =
        controller.as_ref().and_then(|source| read("dhchap.controller".to_owned(), source));
    let is_in_use = |secret: &DhchapSecret| {
        let is_same = |access: &HostAccess| matches!(access, HostAccess::BySecret(other) if other.key() == secret.key());
        admitted.values().any(is_same)
    };
    if controller.as_ref().is_some_and(is_in_use) {
        let what = "the target has the same secret as a host";
        problems.push(Problem::new("dhchap.controller", what, "give each its own"));
    }
    let tls_hosts = config.tls.hosts.keys().map(|host| ("tls.hosts", host));
    for (place, host) in hosts.keys().map(|host| ("dhchap.hosts", host)).chain(tls_hosts) {
        if let Err(error) = check_nqn(host) {
            let advice = "copy it from the host's /etc/nvme/hostnqn";
            problems.push(Problem::new(place, format!("{host:?}: {error}"), advice));
        }
    }
    let mut rules = AuthRules::new(riopipe_platform::random_bytes);
    rules.controller = controller;
    let hash = |name: &str| HashId::ALL.into_iter().find(|hash| hash.name() == name);
    if let Some(hashes) = named(hashes, hash, "dhchap.hashes", &mut problems) {
        rules.hashes = hashes;
    }
    let group = |name: &str| GroupId::ALL.into_iter().find(|group| group.name() == name);
    if let Some(groups) = named(dhgroups, group, "dhchap.dhgroups", &mut problems) {
        rules.groups = groups;
    }
    if !problems.is_empty() {
        return Err(problems);
    }
    let is_open = config.hosts.is_none() && hosts.is_empty() && config.tls.hosts.is_empty();
    Ok(Arc::new(Access {
        hosts: (!is_open).then_some(admitted),
        rules: Some(rules),
        tls_hosts: config.tls.hosts.keys().cloned().collect(),
    }))
}

/// The values with these names; `None` if there are no names.
fn named<T>(
    names: &[String],
    of: impl Fn(&str) -> Option<T>,
    place: &str,
    problems: &mut Vec<Problem>,
) -> Option<Vec<T>> {
    let value = |name: &String| {
        let value = of(name);
        if value.is_none() {
            let advice = "see docs/configuration.md for the names";
            problems.push(Problem::new(place, format!("{name:?} is not known"), advice));
        }
        value
    };
    let values: Vec<T> = names.iter().filter_map(value).collect();
    (!names.is_empty()).then_some(values)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    const SECRET: &str = "DHHC-1:00:ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2n:";
    const HOST: &str = "nqn.2026-01.io.example:host";

    fn config(toml: &str) -> Config {
        Config::from_toml(toml).unwrap()
    }

    #[test]
    fn a_secret_comes_from_a_file_that_only_its_owner_may_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("secret");
        fs::write(&path, format!("{SECRET}\n")).unwrap();
        let source = SecretSource::file(path.to_str().unwrap());
        for (mode, is_read) in [(0o600, true), (0o400, true), (0o640, false), (0o604, false)] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            match source.read() {
                Ok(secret) => assert!(is_read && secret == DhchapSecret::parse(SECRET).unwrap()),
                Err((what, advice)) => {
                    assert!(!is_read, "{what}");
                    assert!(what.contains(&format!("{mode:04o}")) && advice.contains("chmod"));
                }
            }
        }
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        fs::write(&path, SECRET.replace("ia6", "ia7")).unwrap();
        let (what, _) = source.read().unwrap_err();
        assert!(what.contains("checksum") && !what.contains("ia7"), "{what}");
    }

    #[test]
    fn hosts_with_a_secret_must_authenticate_and_others_need_a_name_on_the_list() {
        let of = |toml: &str| access(&config(toml)).unwrap().hosts.clone();
        assert_eq!(of(""), None);
        let secret = format!("[dhchap.hosts]\n\"{HOST}\" = \"{SECRET}\"");
        let by_secret = HostAccess::BySecret(DhchapSecret::parse(SECRET).unwrap());
        let hosts = of(&secret).unwrap();
        assert_eq!(hosts.into_iter().collect::<Vec<_>>(), [(HOST.to_owned(), by_secret.clone())]);
        let other = "nqn.2026-01.io.example:other";
        let hosts = of(&format!("hosts = [\"{HOST}\", \"{other}\"]\n{secret}")).unwrap();
        assert_eq!(hosts[HOST], by_secret, "the list does not excuse it");
        assert_eq!(hosts[other], HostAccess::ByName);
    }

    #[test]
    fn hosts_with_a_key_of_tls_may_connect_and_no_others() {
        let psk = "NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:";
        let tls = format!("[tls.hosts]\n\"{HOST}\" = \"{psk}\"\n");
        let of = |toml: &str| access(&config(toml)).unwrap();
        let by_key = of(&tls);
        assert_eq!(by_key.hosts, Some([(HOST.to_owned(), HostAccess::ByName)].into()));
        assert_eq!(by_key.tls_hosts, [HOST.to_owned()].into());
        // A key does not excuse a host from authentication.
        let both = of(&format!("{tls}[dhchap.hosts]\n\"{HOST}\" = \"{SECRET}\""));
        assert!(matches!(both.hosts.as_ref().unwrap()[HOST], HostAccess::BySecret(_)));
    }

    #[test]
    fn what_is_wrong_is_named_without_the_secret() {
        let toml = format!(
            "[dhchap]\ncontroller = \"{SECRET}\"\nhashes = [\"md5\"]\ndhgroups = [\"modp\"]\n\
             [dhchap.hosts]\n\"{HOST}\" = \"{SECRET}\"\n\"me\" = \"/nowhere/secret\""
        );
        let problems = access(&config(&toml)).unwrap_err();
        let text: Vec<String> = problems.iter().map(ToString::to_string).collect();
        let text = text.join("\n");
        for word in ["md5", "modp", "same secret", "/nowhere/secret", "\"me\""] {
            assert!(text.contains(word), "no {word} in {text}");
        }
        assert!(!text.contains("ia6z"), "{text}");
        let config = config(&toml);
        let shown = format!("{config:?}") + &toml::to_string(&config).unwrap();
        assert!(!shown.contains("ia6z") && shown.contains("not shown"), "{shown}");
    }
}

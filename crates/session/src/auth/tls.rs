//! The pre-shared keys of TLS 1.3 and their identities (TCP §3.6.1; TP 8011, TP 8018).
//!
//! ```text
//! retained PSK = configured PSK, or, if it names a hash function,
//!                Expand-Label(Extract(configured PSK), "HostNQN", host NQN)
//! PSK digest   = base64(HMAC(retained PSK, host NQN ‖ " " ‖ subsystem NQN ‖ " " ‖ "NVMe-over-Fabrics"))
//! identity     = "NVMe1R" ‖ hash ‖ " " ‖ host NQN ‖ " " ‖ subsystem NQN ‖ " " ‖ PSK digest
//! TLS PSK      = Expand-Label(Extract(retained PSK), "nvme-tls-psk", hash ‖ " " ‖ PSK digest)
//! ```
//!
//! `hash` is `01` (SHA-256, cipher suite TLS_AES_128_GCM_SHA256) or `02` (SHA-384,
//! TLS_AES_256_GCM_SHA384): the one that the configured PSK names, or else the one whose length it has.
//! `Extract` is HKDF-Extract (RFC 5869) with a salt of zeroes, and `Expand-Label` is HKDF-Expand-Label
//! (RFC 8446 §7.1). Version 0 of the identity has no digest; its TLS PSK is derived from the whole identity.

use alloc::collections::BTreeMap;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use riopipe_nvme::auth::HashId;
use riopipe_nvme::fabrics::NQN_MAX;
use riopipe_nvme::tls_psk::TlsPsk;
use zeroize::Zeroizing;

use super::keyed::Keyed;

/// The text in the digest of a PSK.
const DIGEST_TEXT: &[u8] = b"NVMe-over-Fabrics";
/// The most bytes of a context of HKDF-Expand-Label.
const CONTEXT_BYTES_MAX: usize = 255;
/// The start of each label of TLS 1.3.
const LABEL_START: &str = "tls13 ";

/// The most bytes of an identity: the version, two NQNs, and the longest digest.
pub const IDENTITY_BYTES_MAX: usize = "NVMe1R02   ".len() + 2 * NQN_MAX + 64;

/// A key of TLS, with the identity under which a host offers it. The key is cleared when it is dropped, and
/// no formatting shows it.
#[derive(Clone, PartialEq, Eq)]
pub struct TlsKey {
    /// The identity of the key.
    pub identity: String,
    /// The hash function of the cipher suite: SHA-256 or SHA-384.
    pub hash: HashId,
    key: Zeroizing<Vec<u8>>,
}

impl TlsKey {
    /// The key: as many bytes as the hash function has.
    #[must_use]
    pub fn key(&self) -> &[u8] {
        &self.key
    }
}

impl fmt::Debug for TlsKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsKey").field("identity", &self.identity).finish_non_exhaustive()
    }
}

/// The keys of all hosts of a target, by identity.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeyRing(BTreeMap<String, RingKey>);

/// A key of a [`KeyRing`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RingKey {
    /// The key.
    pub key: TlsKey,
    /// The host that has it.
    pub owner: KeyOwner,
}

/// The owner of a key: a host, for one subsystem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyOwner {
    /// The host.
    pub hostnqn: String,
    /// The subsystem that the key is for.
    pub subnqn: String,
}

/// Whether a port of a target demands TLS (TREQ in the discovery log).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Demand {
    /// Hosts may use TLS.
    Allowed,
    /// Hosts must use TLS.
    Required,
}

impl KeyRing {
    /// Adds the keys between a host and a subsystem.
    pub fn add(&mut self, psk: &TlsPsk, hostnqn: &str, subnqn: &str) {
        for key in keys(psk, hostnqn, subnqn) {
            let owner = KeyOwner { hostnqn: hostnqn.into(), subnqn: subnqn.into() };
            self.0.insert(key.identity.clone(), RingKey { key, owner });
        }
    }

    /// The key with this identity.
    #[must_use]
    pub fn find(&self, identity: &str) -> Option<&RingKey> {
        self.0.get(identity)
    }
}

/// The keys between a host and a subsystem, under each identity that mainstream peers use; the preferred one
/// first:
///
/// 1. that of the specification,
/// 2. that of libnvme before 1.16, which leaves out the lengths of label and context. A configured PSK
///    without a hash function has the same identity both ways, and has that of the specification only,
/// 3. that of version 0, without a digest, if it has 255 bytes at most: a longer one is no context of
///    HKDF-Expand-Label.
#[must_use]
pub fn keys(psk: &TlsPsk, hostnqn: &str, subnqn: &str) -> Vec<TlsKey> {
    let key = |version, rules| key(psk, hostnqn, subnqn, version, rules);
    let mut keys = alloc::vec![key(Version::One, Rules::Standard)];
    if psk.hash().is_some() {
        keys.push(key(Version::One, Rules::WithoutLengths));
    }
    let version_0 = key(Version::Zero, Rules::Standard);
    if version_0.identity.len() <= CONTEXT_BYTES_MAX {
        keys.push(version_0);
    }
    keys
}

/// The version of an identity.
#[derive(Clone, Copy)]
enum Version {
    Zero,
    One,
}

/// How a label is expanded.
#[derive(Clone, Copy)]
enum Rules {
    Standard,
    /// As libnvme before 1.16: the output's length in little-endian order, no lengths of label and context.
    WithoutLengths,
}

fn key(psk: &TlsPsk, hostnqn: &str, subnqn: &str, version: Version, rules: Rules) -> TlsKey {
    let hash = psk.hash().unwrap_or(match psk.key().len() {
        48 => HashId::Sha384,
        _ => HashId::Sha256,
    });
    let retained = match psk.hash() {
        Some(hash) => derive(hash, psk.key(), "HostNQN", hostnqn, rules),
        None => Zeroizing::new(psk.key().to_vec()),
    };
    let number = hash as u8;
    let (identity, context) = match version {
        Version::Zero => {
            let identity = format!("NVMe0R{number:02} {hostnqn} {subnqn}");
            (identity.clone(), identity)
        }
        Version::One => {
            let digest = digest(hash, &retained, hostnqn, subnqn);
            let identity = format!("NVMe1R{number:02} {hostnqn} {subnqn} {digest}");
            (identity, format!("{number:02} {digest}"))
        }
    };
    let key = derive(hash, &retained, "nvme-tls-psk", &context, rules);
    TlsKey { identity, hash, key }
}

/// The digest of a retained PSK, as text.
fn digest(hash: HashId, retained: &[u8], hostnqn: &str, subnqn: &str) -> String {
    let mut mac = Keyed::new(hash, retained);
    for part in [hostnqn.as_bytes(), b" ", subnqn.as_bytes(), b" ", DIGEST_TEXT] {
        mac.update(part);
    }
    STANDARD.encode(mac.finish())
}

/// `Expand-Label(Extract(key), label, context)`, as long as the output of the hash function.
fn derive(
    hash: HashId,
    key: &[u8],
    label: &str,
    context: &str,
    rules: Rules,
) -> Zeroizing<Vec<u8>> {
    // HKDF-Extract. A salt of zeroes is the same as an empty one, because HMAC pads its key with zeroes.
    let mut extract = Keyed::new(hash, &[]);
    extract.update(key);
    let pseudorandom = Zeroizing::new(extract.finish());
    // HKDF-Expand. One block is enough for an output of this length.
    let len = hash.len_bytes() as u16;
    let label = format!("{LABEL_START}{label}");
    let mut expand = Keyed::new(hash, &pseudorandom);
    match rules {
        Rules::Standard => {
            expand.update(&len.to_be_bytes());
            // All labels are short. Of the contexts, only an identity may be too long, and `keys` drops
            // such a key.
            expand.update(&[label.len() as u8]);
            expand.update(label.as_bytes());
            expand.update(&[context.len() as u8]);
        }
        Rules::WithoutLengths => {
            expand.update(&len.to_le_bytes());
            expand.update(label.as_bytes());
        }
    }
    expand.update(context.as_bytes());
    expand.update(&[1]);
    Zeroizing::new(expand.finish())
}

#[cfg(test)]
mod tests {
    use riopipe_testkit::hex;

    use super::*;

    const HOST: &str = "nqn.psk-test-host";
    const SUBSYSTEM: &str = "nqn.psk-test-subsys";
    const PSK_256: &str = "NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:";
    const PSK_384: &str =
        "NVMeTLSkey-1:02:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwP/w0S89ELi3W2LxIcLXVsDn8kXZQ==:";

    fn keys_of(text: &str) -> Vec<TlsKey> {
        keys(&TlsPsk::parse(text).unwrap(), HOST, SUBSYSTEM)
    }

    /// The identities of libnvme's tests (`test/psk.c`, of the specification's rules and of the earlier ones).
    #[test]
    fn known_identities() {
        for (text, standard, earlier) in [
            (
                PSK_256,
                "NVMe1R01 nqn.psk-test-host nqn.psk-test-subsys iSbjiStwJ/1TrTvDlt2fjFmzvsytOJelidNnA+X5lEU=",
                "NVMe1R01 nqn.psk-test-host nqn.psk-test-subsys 66GuqV08TsAGII39teWUfwQwizjv06Jy8jOcX3NAAzM=",
            ),
            (
                PSK_384,
                "NVMe1R02 nqn.psk-test-host nqn.psk-test-subsys QhW2+Rp6RzHlNtCslyRxMnwJ11tKKhz8JCAQpQ+XUD8f9td1VeH5h53yz2wKJG1a",
                "NVMe1R02 nqn.psk-test-host nqn.psk-test-subsys RsKmYJ3nAn1ApjjMloJFbAkLPivONDAX/xW327YBUsn2eGShXSjCZvBaOxscLqmz",
            ),
        ] {
            let keys = keys_of(text);
            assert_eq!([&keys[0].identity, &keys[1].identity], [standard, earlier]);
        }
        assert_eq!(keys_of(PSK_256)[2].identity, "NVMe0R01 nqn.psk-test-host nqn.psk-test-subsys");
    }

    /// The keys of the Linux kernel's tests (`drivers/nvme/common/tests/auth_kunit.c`).
    #[test]
    fn known_keys() {
        for (hash, psk, digest, tls_key) in [
            (
                HashId::Sha256,
                "1733c59fa7f48fcf37f5f26fc4ff0268ad4f78e030f4f3b0bfd1d47e7bb1447a",
                "OldoKuTfKddMuyCznAZojkWD7P4D9/AtzDzLimtOxqI=",
                "3c17da628474a04d2247c4cab47968c915388193f7c071bd9489cc3666cd7cc8",
            ),
            (
                HashId::Sha384,
                "f14b2dd3234c459694d3bc63f8968bd6b37c2c6de849e22e11874900\
                 1ce4bbe8640b9e3a748cb11ce4b1d71d359cce39",
                "cffMWk8TSS7HOQebjgYEIkrPrjWPV4JE5cdPB8WhEvY4JBW5YynKyv66XscN4A9n",
                "2774753233537b3fa50eb7d16a8e43457d85f4906c005b2236616c5d\
                 80939d0898fff15bb8b77119d2be0aac423e7590",
            ),
        ] {
            let psk = TlsPsk::new(&hex(psk), None).unwrap();
            let keys = keys(&psk, "hostnqn", "subsysnqn");
            assert!(keys[0].identity.ends_with(digest));
            assert_eq!((keys[0].key(), keys[0].hash), (&hex(tls_key)[..], hash));
            assert_eq!(keys.len(), 2, "one identity of version 1, because the two would be equal");
        }
    }

    #[test]
    fn a_ring_has_the_keys_of_each_host() {
        let (mut ring, psk) = (KeyRing::default(), TlsPsk::parse(PSK_256).unwrap());
        ring.add(&psk, HOST, SUBSYSTEM);
        ring.add(&psk, "nqn.other", SUBSYSTEM);
        for key in keys_of(PSK_256) {
            let found = ring.find(&key.identity).unwrap();
            let KeyOwner { hostnqn, subnqn } = &found.owner;
            assert_eq!((&found.key, &hostnqn[..], &subnqn[..]), (&key, HOST, SUBSYSTEM));
        }
        assert_eq!(ring.find("NVMe1R01 nqn.psk-test-host nqn.psk-test-subsys"), None);
    }

    #[test]
    fn each_identity_differs_and_no_formatting_shows_a_key() {
        for text in [PSK_256, PSK_384] {
            let keys = keys_of(text);
            let identities: Vec<&String> = keys.iter().map(|key| &key.identity).collect();
            assert!(identities[0] != identities[1] && identities.len() == 3);
            for key in &keys {
                assert_eq!(key.key().len(), key.hash.len_bytes());
                assert!(key.identity.len() <= IDENTITY_BYTES_MAX);
                let shown = format!("{key:?}");
                assert!(!shown.contains("key:") && shown.contains(&key.identity), "{shown}");
            }
        }
        let long = |letter: &str| format!("nqn.2026-01.io.example:{}", letter.repeat(200));
        let psk = TlsPsk::parse(PSK_384).unwrap();
        let keys = keys(&psk, &long("h"), &long("s"));
        assert_eq!(keys.len(), 2, "no context that is too long");
        assert_eq!(keys[0].identity.len(), IDENTITY_BYTES_MAX);
    }
}

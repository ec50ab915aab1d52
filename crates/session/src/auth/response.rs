//! The responses to challenges (Base §8.3.5.5.4 and §8.3.5.5.5).
//!
//! ```text
//! key      = secret, or HMAC(secret, NQN ‖ "NVMe-over-Fabrics") if the secret names a hash function
//! C        = challenge, or HMAC(H(shared DH secret), challenge) with a DH exchange
//! response = HMAC(key, C ‖ sequence ‖ transaction ‖ SC_C ‖ role ‖ own NQN ‖ 0 ‖ other NQN)
//! ```
//!
//! The NQN in the key is the one of the side that responds.

use alloc::vec::Vec;

use riopipe_nvme::auth::HashId;
use riopipe_nvme::dhchap_secret::DhchapSecret;
use sha2::{Digest, Sha256, Sha384, Sha512};
use zeroize::Zeroizing;

use super::keyed::Keyed;

/// The text in the transformation of a secret.
const TRANSFORM: &[u8] = b"NVMe-over-Fabrics";
/// The role of a host in its response.
const HOST: &[u8] = b"HostHost";
/// The role of a controller in its response.
const CONTROLLER: &[u8] = b"Controller";

/// The side that responds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The host responds to the challenge C1.
    Host,
    /// The controller responds to the challenge C2.
    Controller,
}

/// Everything that a response is computed from, besides the secret.
#[derive(Clone, Copy, Debug)]
pub struct Exchange<'a> {
    /// The hash function that the controller has chosen.
    pub hash: HashId,
    /// The side that responds.
    pub side: Side,
    /// The host's NQN.
    pub hostnqn: &'a str,
    /// The subsystem's NQN.
    pub subnqn: &'a str,
    /// The number of the transaction.
    pub transaction: u16,
    /// The sequence number: S1 for the host, S2 for the controller.
    pub sequence: u32,
    /// The challenge: C1 for the host, C2 for the controller.
    pub challenge: &'a [u8],
}

impl Exchange<'_> {
    /// The response. `shared_secret` is that of the DH exchange; empty without one.
    #[must_use]
    pub fn response(&self, secret: &DhchapSecret, shared_secret: &[u8]) -> Vec<u8> {
        self.with_mac(secret, shared_secret, |mac| mac.finish())
    }

    /// Whether this is the response. The time does not depend on the place of a difference.
    #[must_use]
    pub fn is_response(&self, found: &[u8], secret: &DhchapSecret, shared_secret: &[u8]) -> bool {
        self.with_mac(secret, shared_secret, |mac| mac.matches(found))
    }

    fn with_mac<T>(
        &self,
        secret: &DhchapSecret,
        shared_secret: &[u8],
        end: impl FnOnce(Keyed) -> T,
    ) -> T {
        let (own, other, role) = match self.side {
            Side::Host => (self.hostnqn, self.subnqn, HOST),
            Side::Controller => (self.subnqn, self.hostnqn, CONTROLLER),
        };
        let key = transformed(secret, own);
        let challenge = augmented(self.hash, self.challenge, shared_secret);
        let mut mac = Keyed::new(self.hash, &key);
        mac.update(&challenge);
        mac.update(&self.sequence.to_le_bytes());
        mac.update(&self.transaction.to_le_bytes());
        // SC_C: there is no secure channel.
        mac.update(&[0]);
        mac.update(role);
        mac.update(own.as_bytes());
        mac.update(&[0]);
        mac.update(other.as_bytes());
        end(mac)
    }
}

/// The key that a side with this NQN makes of a secret.
fn transformed(secret: &DhchapSecret, nqn: &str) -> Zeroizing<Vec<u8>> {
    let Some(hash) = secret.hash() else { return Zeroizing::new(secret.key().to_vec()) };
    let mut mac = Keyed::new(hash, secret.key());
    mac.update(nqn.as_bytes());
    mac.update(TRANSFORM);
    Zeroizing::new(mac.finish())
}

/// The challenge that goes into the response.
fn augmented(hash: HashId, challenge: &[u8], shared_secret: &[u8]) -> Vec<u8> {
    if shared_secret.is_empty() {
        return challenge.to_vec();
    }
    let session_key = Zeroizing::new(match hash {
        HashId::Sha256 => Sha256::digest(shared_secret).to_vec(),
        HashId::Sha384 => Sha384::digest(shared_secret).to_vec(),
        HashId::Sha512 => Sha512::digest(shared_secret).to_vec(),
    });
    let mut mac = Keyed::new(hash, &session_key);
    mac.update(challenge);
    mac.finish()
}

#[cfg(test)]
mod tests {
    use std::string::String;

    use super::*;

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| std::format!("{byte:02x}")).collect()
    }

    /// The values were computed by another program, from the formulas of the specification.
    #[test]
    fn known_responses() {
        for (hash, transform, side, shared_len, known) in KNOWN {
            let secret = DhchapSecret::new(&[0x11; 32], transform).unwrap();
            let exchange = Exchange {
                hash,
                side,
                hostnqn: "nqn.2026-01.io.example:host",
                subnqn: "nqn.2026-01.io.example:drives",
                transaction: 0x0102,
                sequence: 0x0304_0506,
                challenge: &std::vec![0x22; hash.len_bytes()],
            };
            let shared = std::vec![0x33; shared_len];
            let response = exchange.response(&secret, &shared);
            assert_eq!(hex(&response), known, "{hash:?} {transform:?} {side:?} {shared_len}");
            assert!(exchange.is_response(&response, &secret, &shared));
            for at in 0..response.len() {
                let mut other = response.clone();
                other[at] ^= 1;
                assert!(!exchange.is_response(&other, &secret, &shared));
            }
            assert!(!exchange.is_response(&response[1..], &secret, &shared));
            assert!(!exchange.is_response(&[], &secret, &shared));
        }
    }

    const KNOWN: [(HashId, Option<HashId>, Side, usize, &str); 5] = [
        (
            HashId::Sha256,
            None,
            Side::Host,
            0,
            "5c15494f0190fa0f38a3f759f9fb898e8ce7a337e019cb066f5c1ceb50ec74ab",
        ),
        (
            HashId::Sha256,
            Some(HashId::Sha256),
            Side::Host,
            256,
            "2ec7405bd08a9ec895e8b00218bc164753faf0049599aacec22758e6fc16adfb",
        ),
        (
            HashId::Sha384,
            Some(HashId::Sha512),
            Side::Controller,
            0,
            "532335f85f30501cea9b7368664f51a6e018baa98b8179571d1ef330b39f3fa44e7445be3f1e2f041ec650e8ada30698",
        ),
        (
            HashId::Sha512,
            Some(HashId::Sha384),
            Side::Controller,
            1024,
            "704066ad2a65dd1f9407ed789be7824230ee00fb433aeb2dab2bee49b000586866614e50573bf3a76db2409cb1e27a451506e7ef50d1c5ce1e6c131949c407bf",
        ),
        (
            HashId::Sha512,
            None,
            Side::Host,
            384,
            "cbdd5f845c20a5155f8a72fba5413b342a2c18db5a65d4bf0d14594cb17d1d4f0f95506aff6a1e1eb804e381b62109aa92383a7181062ff53b71f6de5a036685",
        ),
    ];
}

//! The library's configuration that both ends have in common.

use riopipe_nvme::auth::HashId;
use riopipe_session::auth::tls::TlsKey;
use s2n_tls::config::{self, Config};
use s2n_tls::enums::PskHmac;
use s2n_tls::error::Error;
use s2n_tls::psk::Psk;
use s2n_tls::security::Policy;

/// The library's name of a set of rules: TLS 1.3 only, its three cipher suites, X25519 and the curves of NIST.
/// A key with SHA-256 goes with TLS_AES_128_GCM_SHA256, one with SHA-384 with TLS_AES_256_GCM_SHA384 (TCP
/// §3.6.1.1).
const RULES: &str = "AWS-CRT-SDK-TLSv1.3";

pub(crate) fn config_builder() -> Result<config::Builder, Error> {
    let mut builder = Config::builder();
    builder.set_security_policy(&Policy::from_version(RULES)?)?;
    // No certificate is ever used, so none of this machine is read.
    builder.with_system_certs(false)?;
    Ok(builder)
}

/// A key in the library's form. The library clears its copy.
pub(crate) fn psk_of(key: &TlsKey) -> Result<Psk, Error> {
    let mut builder = Psk::builder()?;
    builder.set_identity(key.identity.as_bytes())?;
    builder.set_secret(key.key())?;
    builder.set_hmac(match key.hash {
        HashId::Sha384 | HashId::Sha512 => PskHmac::SHA384,
        HashId::Sha256 => PskHmac::SHA256,
    })?;
    builder.build()
}

//! Values on the command line: sizes and lists.

use riopipe_media::spec::parse_size;
use riopipe_net::{HostPort, SpinPolicy};
use riopipe_order::ordering_log::SLOTS_MIN;
use riopipe_target::{STREAM_SLOTS_MAX, SecretSource, TlsMode};

/// A size in bytes: `4K`, `1G`, `4096`.
///
/// # Errors
/// The problem, for the user.
pub fn size(text: &str) -> Result<u64, String> {
    parse_size(text)
}

/// A size in bytes that is a positive multiple of 4096 and fits 32 bits.
///
/// # Errors
/// The problem, for the user.
pub fn block_size(text: &str) -> Result<u32, String> {
    let bytes = parse_size(text)?;
    if bytes == 0 || !bytes.is_multiple_of(riopipe::BLOCK_BYTES as u64) {
        return Err(format!(
            "{text} is not a positive multiple of the 4096-byte block; use 4K, 8K, … 64K"
        ));
    }
    u32::try_from(bytes).map_err(|_| format!("{text} is more than 4G"))
}

/// The size of a transfer in bytes: as [`block_size`], and at most 4 MiB.
///
/// # Errors
/// The problem, for the user.
pub fn transfer_size(text: &str) -> Result<u32, String> {
    let bytes = block_size(text)?;
    if bytes > 4 << 20 {
        return Err(format!("{text} is more than 4M"));
    }
    Ok(bytes)
}

/// The size of a prepare area in bytes: 0, or as [`block_size`].
///
/// # Errors
/// The problem, for the user.
pub fn prepare_area(text: &str) -> Result<u32, String> {
    match parse_size(text) {
        Ok(0) => Ok(0),
        _ => block_size(text),
    }
}

/// The number of log slots of a stream; 0 lets the target choose.
///
/// # Errors
/// The problem, for the user.
pub fn slots(text: &str) -> Result<u32, String> {
    match text.parse() {
        Ok(0) => Ok(0),
        Ok(slots) if (SLOTS_MIN..=STREAM_SLOTS_MAX).contains(&slots) => Ok(slots),
        _ => Err(format!(
            "{text:?} is not a number of log entries: a stream has {SLOTS_MIN} to \
             {STREAM_SLOTS_MAX}; without this option, as many as fit"
        )),
    }
}

/// A number of seconds, `0.5` or `30`, more than 0 and at most a day.
///
/// # Errors
/// The problem, for the user.
pub fn seconds(text: &str) -> Result<std::time::Duration, String> {
    text.parse::<f64>()
        .ok()
        .filter(|seconds| *seconds > 0.0 && *seconds <= 86_400.0)
        .map(std::time::Duration::from_secs_f64)
        .ok_or_else(|| format!("{text:?} is not a number of seconds above 0, at most 86400"))
}

/// As [`seconds`], or 0.
///
/// # Errors
/// The problem, for the user.
pub fn seconds_or_none(text: &str) -> Result<std::time::Duration, String> {
    match text.parse::<f64>() {
        Ok(0.0) => Ok(std::time::Duration::ZERO),
        _ => seconds(text)
            .map_err(|_| format!("{text:?} is not a number of seconds from 0 to 86400")),
    }
}

/// A time span with its unit: `100us`, `1.5ms`, `2s`; in nanoseconds.
///
/// # Errors
/// The problem, for the user.
pub fn span_ns(text: &str) -> Result<u64, String> {
    let units = [("ns", 1.0), ("us", 1e3), ("µs", 1e3), ("ms", 1e6), ("s", 1e9)];
    scaled(text, &units)
        .filter(|ns| *ns <= 60e9)
        .map(|ns| ns as u64)
        .ok_or_else(|| format!("{text:?} is not a time of at most a minute: 100us, 1.5ms, 2s"))
}

/// A bandwidth: `25Gbit`, `100Mbit`; in bits per second.
///
/// # Errors
/// The problem, for the user.
pub fn bits_per_s(text: &str) -> Result<u64, String> {
    scaled(text, &[("Gbit", 1e9), ("Mbit", 1e6), ("kbit", 1e3)])
        .filter(|bits| *bits >= 1e3 && *bits <= 1e13)
        .map(|bits| bits as u64)
        .ok_or_else(|| format!("{text:?} is not a bandwidth: 100Mbit, 25Gbit"))
}

/// A number, not negative, followed by one of `units`, the first that fits.
fn scaled(text: &str, units: &[(&str, f64)]) -> Option<f64> {
    let (number, unit) = units.iter().find_map(|(name, unit)| {
        text.strip_suffix(name).map(|number| (number.trim_end(), *unit))
    })?;
    number.parse::<f64>().ok().filter(|n| n.is_finite() && *n >= 0.0).map(|n| n * unit)
}

/// The way to wait for the other side: `hybrid`, `block`, or microseconds to poll before sleeping.
///
/// # Errors
/// The problem, for the user.
pub fn waiting(text: &str) -> Result<SpinPolicy, String> {
    match text.parse::<SpinPolicy>() {
        Ok(SpinPolicy::POLL) | Err(_) => Err(format!(
            "unknown way to wait {text:?}: hybrid (poll for a while, then sleep), block (sleep at \
             once), or the microseconds to poll"
        )),
        Ok(policy) => Ok(policy),
    }
}

/// An address, with a port or without: `192.0.2.1`, `[::1]:4420`, `::1`, `storage.example:4420`.
///
/// # Errors
/// The problem, for the user.
pub fn address(text: &str) -> Result<HostPort, String> {
    text.parse().map_err(|error| {
        format!("{error}; write ADDR or ADDR:PORT, as in 192.0.2.1:4420, [::1]:4420 or a name")
    })
}

/// A host id: a UUID, with or without hyphens.
///
/// # Errors
/// The problem, for the user.
pub fn host_id(text: &str) -> Result<[u8; 16], String> {
    let digits: String = text.chars().filter(|c| *c != '-').collect();
    let wrong =
        || format!("{text:?} is not a host id: 32 hexadecimal digits, as in /etc/nvme/hostid");
    if digits.len() != 32 || !digits.chars().all(|c| c.is_ascii_hexdigit()) {
        return Err(wrong());
    }
    u128::from_str_radix(&digits, 16).map(u128::to_be_bytes).map_err(|_| wrong())
}

/// An NVMe qualified name: `nqn.…`, at most 223 bytes.
///
/// # Errors
/// The problem, for the user.
pub fn nqn(text: &str) -> Result<String, String> {
    if !text.starts_with("nqn.") {
        return Err(format!(
            "{text:?} is not an NVMe qualified name: an example is nqn.2026-11.com.example:disk0"
        ));
    }
    if text.len() > 223 {
        return Err(format!(
            "an NVMe qualified name has at most 223 bytes, this one {}",
            text.len()
        ));
    }
    Ok(text.to_owned())
}

/// The place of a secret of DH-HMAC-CHAP. It is read later, because a message about this argument would
/// show it.
///
/// # Errors
/// None.
pub fn secret_source(text: &str) -> Result<SecretSource, std::convert::Infallible> {
    Ok(SecretSource::from(text.to_owned()))
}

/// Whether hosts must use TLS.
///
/// # Errors
/// The problem, for the user.
pub fn tls_mode(text: &str) -> Result<TlsMode, String> {
    match text {
        "required" => Ok(TlsMode::Required),
        "allowed" => Ok(TlsMode::Allowed),
        _ => Err("give required or allowed".to_owned()),
    }
}

/// A host and the place of its secret: `NQN=FILE`.
///
/// # Errors
/// The problem, for the user.
pub fn host_secret(text: &str) -> Result<(String, SecretSource), String> {
    // An NQN may have `=` in it, and so may a secret, at its end. A path seldom has.
    let inline = ["=DHHC-1:", "=NVMeTLSkey-1:"].iter().find_map(|start| text.split_once(start));
    let (host, source) = match inline {
        Some((host, _)) => (host, &text[host.len() + 1..]),
        None => {
            text.rsplit_once('=').ok_or("give the host's NQN, =, and the file with its secret")?
        }
    };
    Ok((nqn(host)?, SecretSource::from(source.to_owned())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_whole_blocks() {
        assert_eq!(block_size("4K"), Ok(4096));
        assert_eq!(block_size("1M"), Ok(1 << 20));
        for wrong in ["0", "1000", "5000", "8G", "4Q", "", "-4K"] {
            assert!(block_size(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn seconds_are_positive_and_finite() {
        assert_eq!(seconds("0.5").unwrap().as_millis(), 500);
        for wrong in ["0", "-1", "inf", "NaN", "1e9", "soon"] {
            assert!(seconds(wrong).is_err(), "{wrong}");
        }
        assert!(seconds_or_none("0").unwrap().is_zero());
        assert!(seconds_or_none("-1").is_err());
    }

    #[test]
    fn slots_are_within_the_bounds_of_a_target() {
        for (text, number) in [("0", 0), ("4", 4), ("262144", 1 << 18)] {
            assert_eq!(slots(text), Ok(number));
        }
        for wrong in ["1", "3", "262145", "-1", "4294967296", "many"] {
            assert!(slots(wrong).unwrap_err().contains("4 to 262144"), "{wrong}");
        }
    }

    #[test]
    fn spans_and_bandwidths_have_units() {
        assert_eq!(span_ns("100us"), Ok(100_000));
        assert_eq!(span_ns("1.5 ms"), Ok(1_500_000));
        assert_eq!(span_ns("0s"), Ok(0));
        assert_eq!(bits_per_s("25Gbit"), Ok(25_000_000_000));
        assert_eq!(bits_per_s("2.5Gbit"), Ok(2_500_000_000));
        for wrong in ["100", "us", "-1us", "2min", "NaNs", "61s"] {
            assert!(span_ns(wrong).is_err(), "{wrong}");
        }
        for wrong in ["25G", "0Gbit", "1e9Gbit", "fast"] {
            assert!(bits_per_s(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn waiting_has_names_or_microseconds() {
        assert_eq!(waiting("block"), Ok(SpinPolicy::BLOCK));
        assert_eq!(waiting("200"), Ok(SpinPolicy::HYBRID));
        assert!(waiting("poll").is_err() && waiting("a while").is_err());
    }

    #[test]
    fn host_ids_are_uuids() {
        let id = host_id("00112233-4455-6677-8899-aabbccddeeff").unwrap();
        assert_eq!(id[..4], [0, 0x11, 0x22, 0x33]);
        assert!(host_id("0011").is_err());
        assert!(host_id("+0112233445566778899aabbccddeeff").is_err());
    }

    #[test]
    fn names_start_with_nqn() {
        assert!(nqn("nqn.2026-11.com.example:a").is_ok());
        assert!(nqn("disk0").is_err());
        assert!(nqn(&format!("nqn.{}", "x".repeat(220))).is_err());
    }
}

//! `strftime` for a time that is given, in UTC: the conversions that chat templates use.
//!
//! The calendar is computed here because the crate must not read the clock, and a date library would be for this alone.

use std::fmt::Write as _;

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const WEEKDAYS: [&str; 7] = [
    "Sunday",
    "Monday",
    "Tuesday",
    "Wednesday",
    "Thursday",
    "Friday",
    "Saturday",
];
const SECONDS_A_DAY: u64 = 86_400;

/// The time, `unix_seconds` after 1970 began (UTC), in a format.
///
/// # Errors
/// If the format uses a conversion that is not known here.
pub(crate) fn strftime(format: &str, unix_seconds: u64) -> Result<String, String> {
    let date = Date::of(unix_seconds / SECONDS_A_DAY);
    let second = unix_seconds % SECONDS_A_DAY;
    let (hour, minute) = (second / 3600, second / 60 % 60);
    let mut text = String::new();
    let mut characters = format.chars();
    while let Some(character) = characters.next() {
        if character != '%' {
            text.push(character);
            continue;
        }
        let conversion = characters.next();
        let written = match conversion {
            Some('Y') => write!(text, "{}", date.year),
            Some('y') => write!(text, "{:02}", date.year % 100),
            Some('m') => write!(text, "{:02}", date.month),
            Some('B') => write!(text, "{}", date.month_name()),
            Some('b') => write!(text, "{}", &date.month_name()[..3]),
            Some('d') => write!(text, "{:02}", date.day),
            Some('A') => write!(text, "{}", date.weekday),
            Some('a') => write!(text, "{}", &date.weekday[..3]),
            Some('H') => write!(text, "{hour:02}"),
            Some('I') => write!(text, "{:02}", (hour + 11) % 12 + 1),
            Some('p') => write!(text, "{}", if hour < 12 { "AM" } else { "PM" }),
            Some('M') => write!(text, "{minute:02}"),
            Some('S') => write!(text, "{:02}", second % 60),
            Some('F') => write!(text, "{}-{:02}-{:02}", date.year, date.month, date.day),
            Some('T') => write!(text, "{hour:02}:{minute:02}:{:02}", second % 60),
            Some('%') => write!(text, "%"),
            Some(other) => return Err(format!("`%{other}` is not a known conversion of `strftime_now`")),
            None => return Err("`strftime_now` has a format that ends in `%`".to_owned()),
        };
        written.expect("writing to a string cannot fail");
    }
    Ok(text)
}

struct Date {
    year: u64,
    /// From 1.
    month: usize,
    /// From 1.
    day: u64,
    weekday: &'static str,
}

impl Date {
    /// The Gregorian date, `days` after 1970-01-01. Years are counted from March, so that the leap day ends them.
    fn of(days: u64) -> Self {
        // 719,468 days before 1970-01-01 is 0000-03-01; 400 years have 146,097 days.
        let since = days + 719_468;
        let (era, day_of_era) = (since / 146_097, since % 146_097);
        let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let month_from_march = (5 * day_of_year + 2) / 153;
        let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
        let (month, year_ends) = if month_from_march < 10 {
            (month_from_march + 3, 0)
        } else {
            (month_from_march - 9, 1)
        };
        // 1970-01-01 was a Thursday.
        let weekday = WEEKDAYS[usize::try_from((days + 4) % 7).expect("less than 7")];
        let month = usize::try_from(month).expect("at most 12");
        Self {
            year: era * 400 + year_of_era + year_ends,
            month,
            day,
            weekday,
        }
    }

    fn month_name(&self) -> &'static str {
        MONTHS[self.month - 1]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        let check = |seconds, expected: &str| assert_eq!(strftime("%a %d %b %Y %T", seconds).as_deref(), Ok(expected));
        check(0, "Thu 01 Jan 1970 00:00:00");
        check(951_782_400, "Tue 29 Feb 2000 00:00:00");
        check(951_868_799, "Tue 29 Feb 2000 23:59:59");
        check(951_868_800, "Wed 01 Mar 2000 00:00:00");
        check(1_735_689_599, "Tue 31 Dec 2024 23:59:59");
        check(4_107_542_400, "Mon 01 Mar 2100 00:00:00");
    }

    #[test]
    fn conversions() {
        let check = |format, expected: Result<&str, &str>| {
            assert_eq!(
                strftime(format, 1_700_000_000).as_deref().map_err(String::as_str),
                expected
            );
        };
        check(
            "%d %B %y, %A %I:%M %p %H %S %F %m 100%%",
            Ok("14 November 23, Tuesday 10:13 PM 22 20 2023-11-14 11 100%"),
        );
        check("%Q", Err("`%Q` is not a known conversion of `strftime_now`"));
        check("50%", Err("`strftime_now` has a format that ends in `%`"));
    }
}
